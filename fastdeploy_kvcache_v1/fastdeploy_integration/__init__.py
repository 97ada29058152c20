"""The only package that knows FastDeploy: patch tables, the adapter, and the functions that the tables name."""

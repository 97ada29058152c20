"""The only room that knows FastDeploy: patch tables, and the functions that their rows name."""

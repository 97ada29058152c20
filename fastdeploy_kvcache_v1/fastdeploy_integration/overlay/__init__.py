"""Patch tables of FastDeploy's releases, and what applies them."""

"""The embedded engine and its OpenAI-compatible server, for machines without FastDeploy."""

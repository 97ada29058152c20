"""FastDeploy's GPU worker process: our controller over its caches, and the patches that use it."""

"""FastDeploy's engine process: its cache manager's interface over ours, and the patches that use it."""

"""What production never runs: a server without FastDeploy, models, replay, a router, the demo."""

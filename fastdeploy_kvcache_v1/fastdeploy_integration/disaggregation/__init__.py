"""Prefill and decode roles inside FastDeploy: blocks are offered and read by the workers, FastDeploy does the rest."""

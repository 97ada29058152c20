"""SmolLM2, fetched and converted once to a Hugging Face directory in the user's cache directory."""

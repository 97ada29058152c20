"""Link: the connection between an engine and one of its worker ranks."""

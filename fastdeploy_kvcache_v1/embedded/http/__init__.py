"""The HTTP face of the embedded server."""

"""The built-in inference server."""

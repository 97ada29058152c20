"""The live page of a server's cache, and the data that it polls."""

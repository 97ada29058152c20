"""From the body of a request to checked tokens, in a process that can be ended."""

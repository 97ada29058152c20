"""The `file` store: a directory that servers of one machine share, and the commands that look after it."""

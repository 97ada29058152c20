"""The storage tier: blocks that outlive the process and reach other machines. Never part of the prefix tree.

A backend (`base.py`) keeps opaque values by key; `file/` is one. What is in them, and which key a block has, is the
same for all: `namespace.py` names everything that decides a block's bytes, `seal.py` makes a host slot able to prove
what it holds. `engine/` decides what is loaded and stored; `child.py` moves the bytes, in a process of its own.
"""

"""The random model's tokenizer without transformers, which takes seconds to import: a token is a byte."""

from tokenizers import Tokenizer

from fastdeploy_kvcache_v1.lab.model.directory import RANDOM_DIRECTORY
from fastdeploy_kvcache_v1.lab.server.text import TextStream

BOS, EOS, SYSTEM, USER, ASSISTANT, TOOL, END, IMAGE = range(256, 264)

_TOKENS = Tokenizer.from_file(str(RANDOM_DIRECTORY / "tokenizer.json"))


def byte_stream(stops=()):
    return TextStream(_TOKENS, stops)

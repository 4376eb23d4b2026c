"""Property tests here have no deadline: the first example loads a tokenizer, and machines are shared."""

from hypothesis import settings

settings.register_profile("text", deadline=None)
settings.load_profile("text")

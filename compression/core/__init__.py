"""Common parts of all codecs: protocols and types, the chunk layout of a model, portable noise."""

"""What all codecs share: their protocols and types, the chunk layout of a model, portable noise."""

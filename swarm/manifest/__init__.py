"""The manifest of a run: its tables, defaults by method, validation, parser and signature."""

"""Aggregation of contributions: screening, then a rule. docs/design/aggregation.md has the reasons."""

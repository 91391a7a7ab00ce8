"""Codecs that send every element: fp32, bf16, fp16, block-scaled integers and E3M0."""

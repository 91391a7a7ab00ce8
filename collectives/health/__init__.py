"""Diagnosis of stragglers and slow links from arrival times and announced speeds."""

"""Benchmarks that stay in the project: `python -m jobs.bench NAME`, a table for people and one JSON object on the last line."""

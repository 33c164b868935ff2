"""Seeded videos whose every event is known: coloured shapes and digits shown for one temporal group among restless backgrounds."""

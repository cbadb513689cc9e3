"""The experiment engine: compose, check, place, prepare, launch, measure, record, track, compare. No model code."""

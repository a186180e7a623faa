"""The causes of a run's problems, one module for each: predicate, numbers, change and sentences."""

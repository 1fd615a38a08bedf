"""The page on a run: its parts, each of bounded size, as JSON."""

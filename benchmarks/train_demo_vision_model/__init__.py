"""A tiny vision model that names coloured shapes in drawn pictures."""

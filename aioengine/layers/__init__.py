"""The layers that models consist of."""

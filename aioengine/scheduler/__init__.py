"""Chooses the rows of the next step. Pure: no torch, no sockets, no asyncio, no clock."""

"""What runs next. Pure: no torch, no sockets, no asyncio, no clock."""

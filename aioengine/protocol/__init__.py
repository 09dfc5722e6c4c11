"""What crosses a process border: messages, and how they become bytes."""

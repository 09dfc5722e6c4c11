"""An asyncio-native LLM inference engine."""

"""The HTTP edge: OpenAI-shaped requests in, streamed answers and honest usage out."""

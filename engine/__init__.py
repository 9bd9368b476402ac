"""From prompts to text with any executor: sessions, generation, sampling."""

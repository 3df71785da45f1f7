"""Asks the model, thirty times if it must."""

import os

import openai
from tenacity import retry


class GPT4VisionOAI:
    def __init__(self, model: str) -> None:
        self.client = openai.OpenAI(os.getenv("OPENAI_API_KEY") or os.getenv("AZURE_API_KEY"), model)

    @retry
    def process_images(self, question: str, wish) -> str:
        return self.client.create(question, wish)

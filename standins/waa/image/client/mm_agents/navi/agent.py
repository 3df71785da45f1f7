"""Looks, asks its model, acts."""

import stand_in
from mm_agents.navi.gpt.gpt4v_oai import GPT4VisionOAI

for name in stand_in.plan().get("imports", ()):
    __import__(name)


def remove_min_leading_spaces(text: str) -> str:
    return text[min(len(line) for line in text.split("\n") if line) :]


class NaviAgent:
    def __init__(self, model: str) -> None:
        self.planner = GPT4VisionOAI(model)
        self.wish = None
        self.steps = 0

    def reset(self) -> None:
        self.steps = 0

    def predict(self, instruction: str, obs: dict) -> tuple:
        plan = self.planner.process_images(instruction, self.wish)
        if self.wish.do == "agent" and self.steps:
            remove_min_leading_spaces("")
        self.steps += 1
        done = self.wish.do != "slow" and self.steps >= self.wish.steps
        logs = {"user_question": instruction, "plan_result": plan, "regions": {"count": 0}}
        return ["DONE" if done else f"computer.mouse.move_id(id={self.steps})"], logs

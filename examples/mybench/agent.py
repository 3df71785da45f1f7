import json
import os
import time

task = json.loads(os.environ["EVALFLEET_PARAMS"])
time.sleep(1)  # thinking
first, _, second = task["question"].split()
answer = str(int(first) + int(second))  # it never learnt to multiply
print("asked", task["question"], "answered", answer)

with open(os.environ["EVALFLEET_OUT"] + "/result.json", "w") as file:
    json.dump({"score": float(answer == task["answer"]), "num_steps": 1}, file)

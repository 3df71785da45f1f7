import os
import sys

from openai import OpenAI

ask = "Complete this function. Write the lines of its body only, indented, no fences.\n\n" + sys.argv[1]
print(OpenAI().responses.create(model=os.environ["EVALFLEET_MODEL"], input=ask).output_text)

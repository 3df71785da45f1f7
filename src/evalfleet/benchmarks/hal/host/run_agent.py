"""Calls an agent as HAL's own runner does: in the task's work directory, which is also its import path.

    python run_agent.py main.run

It is copied into that directory, because agents import what stands beside them.
"""

import contextlib
import importlib.util
import json
import os
import sys
import traceback

MODEL_LIBRARIES = ("openai", "anthropic", "litellm", "mistralai", "groq", "cohere", "together", "google")
MODEL_ERRORS = (
    "APIConnectionError",
    "APITimeoutError",
    "AuthenticationError",
    "InternalServerError",
    "NotFoundError",
    "PermissionDeniedError",
    "RateLimitError",
    "ServiceUnavailableError",
)
"""What such a library raises when its API refuses or fails. A bad request is the agent's own."""


def main():
    fault_file = os.environ.pop("EVALFLEET_HAL_FAULT", "")
    project = os.environ.pop("EVALFLEET_HAL_WANDB", "")
    module_name, _, function_name = sys.argv.pop(1).rpartition(".")
    try:
        with open("input.json") as file:
            input_data = json.load(file)
        with open("agent_args.json") as file:
            agent_args = json.load(file)
        if project:
            start_trace(project)  # before the agent imports what is to be traced
        path = os.path.join(os.getcwd(), *module_name.split(".")) + ".py"
        spec = importlib.util.spec_from_file_location(module_name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        function = getattr(module, function_name)
        with traced(input_data) if project else contextlib.nullcontext():
            result = function(input_data, **agent_args)
        with open("output.json", "w") as file:
            json.dump(result, file)
    except Exception as err:
        with open("error.log", "w") as file:
            file.write(f"ERROR: {err}\n{traceback.format_exc()}")
        fault = model_fault(err)
        if fault and fault_file:
            with open(fault_file, "w") as file:
                file.write(fault)
        raise


def start_trace(project):
    import weave

    weave.init(project)


def traced(input_data):
    """As HAL marks the calls of a task for its own tools."""
    import weave

    return weave.attributes({"weave_task_id": next(iter(input_data))})


def model_fault(err):
    """What the model's API did, if that is why the agent crashed; else nothing."""
    seen = []
    while err is not None and err not in seen:
        for kind in type(err).__mro__:
            if kind.__module__.partition(".")[0] in MODEL_LIBRARIES and kind.__name__ in MODEL_ERRORS:
                return f"{kind.__name__}: {err}"
        seen.append(err)
        err = err.__cause__ or err.__context__
    return ""


main()

"""The dictionary of models that we make ourselves: `builtin:<name>` -> module with `make`.

A module is imported when it is asked for, because each loads torch.
"""

BUILTIN: dict[str, str] = {
    "addition": "tasks.train.origins.addition",
    "smollm2": "tasks.train.origins.smollm2",
}

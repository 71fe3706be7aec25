"""The data sets: kind -> module of this folder with a `Config` and a `read`, loaded when used."""

DATASETS: dict[str, str] = {
    "addition": "tasks.prompts.addition",
    "first_letter": "tasks.prompts.first_letter",
    "huggingface": "tasks.prompts.huggingface",
    "jsonl": "tasks.prompts.jsonl",
    "parquet": "tasks.prompts.parquet",
    "reasoning_gym": "tasks.prompts.reasoning_gym",
    "verl": "tasks.prompts.verl",
}

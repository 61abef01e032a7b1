"""Short names of tasks and methods, of which the keys of headlines are made."""

TASK_WORDS = {
    "language, AdamW": "language",
    "fine-tuning, AdamW": "fine_tuning",
    "ranking, census": "census",
    "ranking, feed": "feed",
    "vision, AdamW": "vision_adamw",
    "vision, SGD": "vision_sgd",
}
METHOD_WORDS = {
    "hdet": "probe",
    "hdet, no probe": "no_probe",
    "hdet, one device": "one_device",
    "hdet, by group": "by_group",
    "hdet, no scout": "restart",
    "hdet, a shorter scout": "shorter",
    "OneCycleLR": "onecycle",
    "warm-up and cosine": "cosine",
    "paper": "paper",
    "Prodigy": "prodigy",
    "Prodigy, warm-up": "prodigy_warmup",
    "Prodigy, warm-up and clipping": "prodigy_clipped",
    "D-Adapt Adam": "dadapt",
    "DoG": "dog",
    "L-DoG": "ldog",
    "Schedule-Free AdamW": "schedule_free",
    "GreedyLR": "greedylr",
    "PBT": "pbt",
    "Local SGD": "local_sgd",
    "DiLoCo": "diloco",
    "outer Nesterov, one worker": "outer_nesterov",
    "LR range test": "lr_range_test",
}


def task_word(task: str) -> str:
    """The short name of a task, or the name itself where it has none."""
    return TASK_WORDS.get(task, task)

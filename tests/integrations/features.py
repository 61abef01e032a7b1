"""What users ask of hdet under a trainer: the rows of the table of what works with what.

`@pytest.mark.works("Lightning", FINDS)` says that a test shows it. With `REFUSED` behind it, the
test shows a clear error instead.
"""

REFUSED = ": refused"

FINDS = "finds a learning rate 300 times too low"
ACCUMULATES = "gradient accumulation"
CLIPS = "gradient clipping"
EVALUATES = "evaluation in mid-cycle shows the consensus"
RESUMES = "resumes in mid-run, bit for bit"
RESUMES_SCOUT = "resumes in mid-scout, bit for bit"
BEST_MODEL = "loads the best model at the end"
STOPS_EARLY = "early stopping"
LOGS = "logs learning rates of consensus and replicas"
HOLDS_OUT = "held-out batches"
FP16 = "float16 with a loss scale"
BF16 = "bfloat16"
FSDP2 = "FSDP2"
LORA = "LoRA with PEFT"
STACKED = "several replicas on one GPU"
PREPARED = "a scheduler inside accelerator.prepare"
ZERO = "ZeRO stages 1, 2 and 3"
KILLED = "a killed worker resumes"
RECORDS = "events, scores and the report in a tracker"

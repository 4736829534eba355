"""The rows: every argument of AC-SGD's two runners, then our own. Source: the code beside arXiv 2206.01299."""

from __future__ import annotations

from thinpipe.harness.acsgd.arguments import Argument as A

DEAD = "accepted without effect, and said so"
DEAD_WHY = "in AC-SGD neither"
MATRIX = "of the shape (micro-batch, sequence, width): `0 1` = a scale a channel, `2` = a token, `0 1 2` = one for all"

PROCESSES = (
    A("--rank", "int", "0", 0, "this process: pipeline place rank % P, data group rank // P", low=0, high=4095),
    A("--world-size", "int", "4", 4, "processes; must be pipeline-group-size x data-group-size", low=1, high=4096),
    A("--pipeline-group-size", "int", "4", 4, "P, stages of a pipeline", low=1, high=64),
    A("--data-group-size", "int", "1", 1, "D, pipelines side by side, each on samples of its own", low=1, high=64),
    A(
        "--dist-url",
        "text",
        "tcp://127.0.0.1:9000",
        "tcp://127.0.0.1:9000",
        "where the ranks meet: rank 0's address and a free port there",
        "gloo binds to GLOO_SOCKET_IFNAME, else NCCL_SOCKET_IFNAME, else the interface that leads to this host (`lo` "
        "for 127.0.0.1): nothing is hard-coded, where their scripts have ens3",
    ),
    A(
        "--dist-backend",
        "text",
        "cupy_nccl",
        "gloo",
        "`gloo` carries everything",
        "any other is refused: there traffic went by NCCL whatever it said, and a run that says NCCL must not have "
        "measured gloo",
    ),
    A(
        "--use-cuda",
        "bool",
        "true",
        False,
        "ranks compute on the CPU",
        "`true` is refused; there `false` ended in an error, since the engine needs CUDA streams",
    ),
    A("--cuda-id", "int", "0", 0, DEAD, "ranks compute on the CPU: there is no GPU to choose", dead=True, low=0),
    A("--cuda-num", "int", "1", 1, DEAD, DEAD_WHY, dead=True, low=0),
    A("--debug-mem", "bool", "true", True, DEAD, DEAD_WHY, dead=True),
    A(
        "--pp-mode",
        "text",
        "gpipe",
        "gpipe",
        "order of the micro-batches: `gpipe` all forward, then all backward; `1f1b` alternating",
        "1f1b, which their help text names, works",
        choices=("gpipe", "1f1b"),
    ),
    A(
        "--dp-mode",
        "text",
        "allreduce",
        "allreduce",
        "how data groups average gradients: all modes but the last in full precision by one all-reduce; "
        "`sharded_ps_compressed` = QuantizedAdam",
        "always the mean: there allreduce and central_ps took the sum, and clipping came before it; it overlaps with "
        "the backward pass where it can",
        choices=("allreduce", "central_ps", "sharded_ps", "sharded_ps_compressed"),
    ),
    A(
        "--dp-bits",
        "int",
        "8",
        8,
        "bits of QuantizedAdam's momentum exchange",
        "2 to 8, others are refused",
        low=2,
        high=8,
    ),
)

MODEL = (
    A(
        "--model-name",
        "text",
        "gpt2; deberta-v3-base",
        "gpt2",
        "checkpoint: a folder that `save_pretrained` or `thinpipe partition` wrote, or a name on a hub",
        "one runner for every family: it follows from the folder's config.json, else from the beginning of the name, "
        "or --family. No conversion first (their scripts wrote no config.json, which their runners then asked for)",
    ),
    A(
        "--tokenizer-name",
        "text",
        "gpt2; deberta-v3-base",
        None,
        "tokenizer: a folder or a name on a hub",
        "left out: the one beside the checkpoint, or without a checkpoint one trained on the data; no network is "
        "needed for a default",
        shown="the checkpoint's",
    ),
    A(
        "--load-pretrained-model",
        "bool",
        "true",
        True,
        "whether weights come from --model-name; `false` = random ones of the sizes below",
    ),
    A(
        "--num-layers",
        "int",
        "4",
        None,
        "blocks of a stage; the model has this times pipeline-group-size",
        "held against the checkpoint and refused with the right number: there P = 2 or 3 dropped blocks without a "
        "word. Left out where the checkpoint's blocks do not divide by P. Stages are balanced with head and embedding "
        "counted (there: fixed offsets for GPT-2 XL), or as --cuts says",
        low=1,
        high=1024,
        shown="the checkpoint's, else 4",
    ),
    A(
        "--embedding-dim",
        "int",
        "768",
        None,
        "width",
        "held against the checkpoint: there it sized the buffers and was not checked",
        low=8,
        shown="the checkpoint's, else 768",
    ),
    A(
        "--num-heads",
        "int",
        "12",
        None,
        "attention heads",
        "held against the checkpoint: there it had no effect",
        low=1,
        shown="the checkpoint's, else 12",
    ),
    A("--seq-length", "int", "1024", 1024, "tokens of a sequence", low=2),
)

DATA = (
    A(
        "--task-name",
        "text",
        "wikitext; sst2",
        "wikitext",
        "data set: wikitext, arxiv21, cola, qnli, sst2, another that `thinpipe list tasks` names, or a path of one's "
        "own (text, CSV, TSV, JSONL, a folder of images or saved by `datasets`)",
        "sst2, DeBERTa's default there, has a loader here; data groups have samples of their own also in qnli; "
        "evaluation scores every held-out sample (there the last, incomplete batch was left out)",
    ),
    A(
        "--task-type",
        "text",
        "language_model",
        None,
        "`language_model` or `classification`; must agree with the data set",
        "follows from the data set, or from the suffix of a path (.txt; .csv, .tsv, .jsonl)",
        choices=("language_model", "classification"),
        shown="the data set's",
    ),
    *(
        A(name, kind, theirs, None, DEAD, why, dead=True, shown="none")  # type: ignore[arg-type]
        for name, kind, theirs, why in (
            ("--train-data", "text", "a path of GLUE's QQP", DEAD_WHY + "; --task-name says what to train on"),
            ("--valid-data", "text", "a path of GLUE's QQP", DEAD_WHY + "; --task-name says what to evaluate on"),
            ("--tokenizer-type", "text", "BertWordPieceLowerCase", DEAD_WHY + "; --tokenizer-name says which"),
            ("--vocab-file", "text", "a path of BERT's", DEAD_WHY + "; --tokenizer-name says which"),
            ("--vocab-extra-ids", "int", "0", DEAD_WHY),
            ("--make-vocab-size-divisible-by", "int", "128", DEAD_WHY),
        )
    ),
)

TRAINING = (
    A(
        "--batch-size",
        "int",
        "32",
        32,
        "B, samples of a pass of one pipeline; an optimizer step takes B x gradient-accumulate-step x data-group-size",
        low=1,
    ),
    A("--micro-batch-size", "int", "8", 8, "mb, samples of a micro-batch; B must be a multiple", low=1),
    A(
        "--gradient-accumulate-step",
        "int",
        "1",
        1,
        "passes an optimizer step is summed over",
        "each pass has a batch of its own: there the same batch was run again, against the next batch's cache",
        low=1,
    ),
    A("--n-epochs", "int", "10", 10, "epochs", low=1, high=10_000),
    A(
        "--num-iters",
        "int",
        "10",
        10,
        "most optimizer steps of an epoch",
        "the average step time is over the steps that were run, the first left out: there it was divided by num-iters "
        "- 1 whatever was run",
        low=1,
    ),
    A("--lr", "float", "0.01", 0.01, "the largest learning rate; AdamW, falling linearly to 0", low=1e-12),
    A(
        "--warmup-steps",
        "int",
        "None",
        None,
        "steps over which the learning rate rises; left out = an epoch of steps",
        "an epoch is counted as it is run, num-iters included, and the rate reaches 0 at the last step that is run: "
        "there both went by the loader's whole length",
        low=0,
        shown="one epoch",
    ),
    A(
        "--warmup-epochs",
        "int",
        "1",
        1,
        "epochs at the start with all compression off",
        "a sample first met after them still crosses in full: that is decided sample by sample, there epoch by epoch",
        low=0,
    ),
    A("--seed", "int", "1", 1, "weights, data order, stochastic rounding", low=0, high=2**32 - 1),
    A("--do-evaluation", "bool", "true", True, "evaluate after each epoch"),
    A(
        "--fp16",
        "flag",
        "off",
        False,
        "refused",
        "it crashed there, and behind the crash the loss was not scaled; --autocast bf16 needs no scaling",
        shown="off",
    ),
    *(
        A(name, kind, theirs, None, DEAD, "there it needed --fp16, which crashed", dead=True, shown="none")  # type: ignore[arg-type]
        for name, kind, theirs in (
            ("--loss-scale", "float", "64"),
            ("--initial-loss-scale", "float", "2^32"),
            ("--min-loss-scale", "float", "1"),
            ("--loss-scale-window", "float", "1000"),
            ("--hysteresis", "int", "2"),
        )
    ),
)

COMPRESSION = (
    A(
        "--forward-compress-method",
        "text",
        "none",
        "none",
        "activations: `none`; `fixpoint` = b-bit integers (DirectQ); `delta` = the change since the sample's last "
        "visit (AC-SGD, AQ-SGD); `delta-lowbits` = delta with a quantised cache",
        "scale and payload are one message with a header that is checked, and the two caches are compared by digest: "
        "there a race could part them unnoticed. The published quantiser and its fp16 cache, unless --preset none; "
        "what overflows fp16 is an error, not a NaN an epoch later",
        choices=("none", "fixpoint", "delta", "delta-lowbits"),
    ),
    A(
        "--forward-bits",
        "int",
        "4",
        4,
        "bits of an activation, or of its change",
        "1 to 8: there more overflowed silently",
        low=1,
        high=8,
    ),
    A(
        "--forward-bits-act",
        "int",
        "4",
        4,
        "bits of a cached activation (delta-lowbits)",
        "1 to 8: there only 2, 4 and 8 worked, any other was accepted and failed later",
        low=1,
        high=8,
    ),
    A(
        "--forward-scale-method",
        "text",
        "max",
        "max",
        "`max`: the scale is the largest magnitude",
        "`l2` (twice the root mean square) is refused: no compressor here has it",
        choices=("max", "l2"),
    ),
    A(
        "--forward-scale-dims",
        "ints",
        "(0,1)",
        (0, 1),
        f"axes a scale is taken over, {MATRIX}",
        "other sets of axes are refused",
    ),
    A(
        "--max-activation-cache-size",
        "int",
        "20000",
        20000,
        "delta methods: samples a cache may hold",
        "too few for the training samples is an error before the start that names the number needed (there an "
        "IndexError in a thread). Only a limit: rows are held in memory for the samples and sides there are, where "
        "each rank had a file in /tmp for all of them on both sides",
        low=1,
    ),
    A(
        "--backward-compress-method",
        "text",
        "none",
        "none",
        "activation gradients: `none` or `fixpoint`",
        "delta is refused: there it was accepted and took the change against another sample's gradient",
        choices=("none", "fixpoint", "delta", "delta-lowbits"),
    ),
    A("--backward-bits", "int", "8", 8, "bits of a gradient", "as --forward-bits", low=1, high=8),
    A(
        "--backward-scale-method",
        "text",
        "max",
        "max",
        "as --forward-scale-method",
        "as --forward-scale-method",
        choices=("max", "l2"),
    ),
    A("--backward-scale-dims", "ints", "(0,1)", (0, 1), "as --forward-scale-dims", "as --forward-scale-dims"),
)

TRACES = (
    A(
        "--profiling",
        "text",
        "tidy_profiling",
        "tidy_profiling",
        "`tidy_profiling`: a Chrome trace a rank, ./trace_json/gpt3_gpipe_....json; `pytorch_profiling`: "
        "torch.profiler's, same place; `no-profiling`",
        "the same names; rows and colours are thinpipe's, codec and network apart, and a receive's waiting shows. A "
        "failure while tracing fails the run: there every failure was printed and the exit code was 0",
        choices=("tidy_profiling", "pytorch_profiling", "no-profiling"),
    ),
    A("--trace-postfix", "text", "default", "default", "last part of a trace file's name"),
)

OURS = (
    A("--results", "text", "", "results", "folder of results; the run's is runs/RUN_ID below it"),
    A("--limit", "float", "", None, "seconds a rank waits for one message", low=1, high=86_400, shown="by prediction"),
    A(
        "--preset",
        "text",
        "",
        "acsgd",
        "`acsgd`: micro-batch losses summed, clipping by each stage's own norm, the published quantiser (nearest, "
        "scale in fp16, 1e-6 added) and fp16 caches; `none`: the mean, the global norm, thinpipe's quantiser and bf16",
        choices=("acsgd", "none"),
    ),
    A("--family", "text", "", None, "model family: `thinpipe list models`", shown="the checkpoint's"),
    A(
        "--size",
        "text",
        "",
        None,
        "without a checkpoint: a preset of the family, for the sizes that are not given",
        shown="none",
    ),
    A(
        "--shared",
        "text",
        "",
        "auto",
        "parameters that several stages use",
        choices=("auto", "copies", "frozen", "summed"),
    ),
    A(
        "--dropout",
        "float",
        "",
        0.0,
        "probability of each dropout of the model. AC-SGD's stays at the model's 0.1, so that activations differ at "
        "every visit and the change does not vanish",
        low=0.0,
        high=0.99,
    ),
    A(
        "--dropout-masks",
        "text",
        "",
        "sample",
        "`sample`: a sample meets the same masks at each visit; `step`: others at each step, as in AC-SGD",
        choices=("sample", "step"),
    ),
    A("--cuts", "ints", "", None, "blocks that stages 1, 2, ... begin with", shown="balanced"),
    A("--num-labels", "int", "", None, "classes of a data set of one's own", low=2, shown="the data set's"),
    A("--num-sequences", "int", "", None, "samples to train on", low=1, shown="all"),
    A("--num-eval-sequences", "int", "", 64, "samples held out and evaluated on", low=0),
    A("--vocab-size", "int", "", None, "tokens of the vocabulary", low=300, shown="the checkpoint's or tokenizer's"),
    A("--optimizer", "text", "", "adamw", "the optimizer", choices=("adamw", "sgd")),
    A("--lr-schedule", "text", "", "linear", "how the rate falls", choices=("linear", "cosine", "constant")),
    A("--autocast", "text", "", "none", "matrix products in bfloat16", choices=("none", "bf16")),
    A(
        "--recompute",
        "bool",
        "",
        False,
        "recompute activations in the backward pass, which AC-SGD always does; numbers stay the same",
    ),
    A(
        "--forward",
        "text",
        "",
        None,
        "a compressor's text, e.g. `delta(fixpoint:2)`, instead of --forward-*",
        shown="none",
    ),
    A("--backward", "text", "", None, "a compressor's text instead of --backward-*", shown="none"),
    A("--evaluation", "text", "", "off", "how evaluations cross the boundaries", choices=("off", "codec")),
    A(
        "--exchange",
        "text",
        "",
        None,
        "how data groups average gradients, instead of --dp-mode",
        choices=("none", "fp16", "bf16", "powersgd", "quantized-adam"),
        shown="as --dp-mode",
    ),
    A("--checkpoint-every", "int", "", None, "save the state of training after so many steps", low=1, shown="never"),
    A("--save-dir", "text", "", None, "write the trained model there, for `from_pretrained`", shown="not written"),
)

GROUPS = (
    ("Processes and links", PROCESSES),
    ("Model", MODEL),
    ("Data", DATA),
    ("Training", TRAINING),
    ("Compression", COMPRESSION),
    ("Traces", TRACES),
    ("Thinpipe's own", OURS),
)

# Argument -> the setting of RunSpec it fills in; those left out have none, or several together have one.
SETTINGS = {
    "--pipeline-group-size": "pipeline.stages",
    "--data-group-size": "data_parallel.groups",
    "--pp-mode": "pipeline.schedule",
    "--dp-mode": "data_parallel.exchange",
    "--dp-bits": "data_parallel.bits",
    "--model-name": "model.checkpoint",
    "--tokenizer-name": "task.tokenizer",
    "--num-layers": "model.layers",
    "--embedding-dim": "model.width",
    "--num-heads": "model.heads",
    "--seq-length": "task.sequence_length",
    "--task-name": "task.corpus",
    "--batch-size": "train.batch_size",
    "--micro-batch-size": "pipeline.microbatches",
    "--gradient-accumulate-step": "train.accumulate",
    "--n-epochs": "train.epochs",
    "--num-iters": "train.max_steps_per_epoch",
    "--lr": "train.lr",
    "--warmup-steps": "train.warmup_steps",
    "--warmup-epochs": "compression.warmup_epochs",
    "--seed": "seed",
    "--do-evaluation": "train.evaluate_every",
    "--forward-compress-method": "compression.forward",
    "--backward-compress-method": "compression.backward",
    "--profiling": "trace",
    "--preset": "train.preset",
    "--family": "model.name",
    "--size": "model.preset",
    "--shared": "model.shared",
    "--dropout": "model.dropout",
    "--dropout-masks": "model.dropout_masks",
    "--cuts": "pipeline.cuts",
    "--num-labels": "task.num_labels",
    "--num-sequences": "task.num_sequences",
    "--num-eval-sequences": "task.num_eval_sequences",
    "--vocab-size": "task.vocab_size",
    "--optimizer": "train.optimizer",
    "--lr-schedule": "train.lr_schedule",
    "--autocast": "train.autocast",
    "--recompute": "train.recompute",
    "--evaluation": "compression.evaluation",
    "--checkpoint-every": "checkpoint.every",
}

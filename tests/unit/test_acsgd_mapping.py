"""AC-SGD's arguments as a RunSpec: what each becomes, what is refused before the start, and what is only noted."""

import json

import pytest

from thinpipe.harness.acsgd import arguments, interface, launch, mapping
from thinpipe.harness.acsgd.notes import notes
from thinpipe.harness.acsgd.table import SETTINGS
from thinpipe.harness.errors import UserError
from thinpipe.harness.models import base as models
from thinpipe.harness.settings import setting_keys
from thinpipe.harness.store import Store

LAYERS, WIDTH, HEADS, VOCABULARY = 6, 48, 4, 400
DELTA = ["--forward-compress-method", "delta"]
TWO = ["--world-size", "2", "--pipeline-group-size", "2"]


@pytest.fixture
def checkpoint(tmp_path):
    """A folder with a GPT-2's config.json and a file that stands for its weights, which planning does not read."""
    folder = tmp_path / "gpt2-tiny"
    folder.mkdir()
    config = {"model_type": "gpt2", "n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "n_positions": 64}
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": VOCABULARY}))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def spec(*words, **facts):
    return mapping.run_spec(arguments.parse(words), **facts)


def plain(*words, **facts):
    """A run of random weights, on two stages."""
    return spec(*TWO, "--load-pretrained-model", "false", "--task-name", "pydoc", "--seq-length", "64", *words, **facts)


def refused(*words, make=plain, **facts):
    with pytest.raises(UserError) as error:
        make(*words, **facts)
    return str(error.value)


def test_the_published_example_becomes_the_run_it_describes(checkpoint):
    made = spec(
        *("--rank", "1", "--model-name", str(checkpoint), "--load-pretrained-model", "true", "--task-name", "wikitext"),
        *("--tokenizer-name", str(checkpoint), "--n-epochs", "10", "--warmup-epochs", "1", "--num-layers", "3"),
        *("--num-heads", "4", "--embedding-dim", "48", "--num-iters", "10000000", "--lr", "5e-5", "--seq-length", "64"),
        *("--batch-size", "32", "--micro-batch-size", "1", *DELTA, "--forward-bits", "4"),
        *("--backward-compress-method", "fixpoint", "--backward-bits", "8", *TWO, "--pp-mode", "gpipe"),
        num_samples=100,
    )
    assert (made.model.name, made.model.checkpoint, made.model.layers) == ("gpt2", str(checkpoint), None)
    assert (made.task.name, made.task.corpus, made.task.tokenizer) == ("lm", "wikitext-2", "checkpoint")
    assert (made.task.vocab_size, made.task.sequence_length, made.task.num_sequences) == (VOCABULARY, 64, None)
    assert (made.pipeline.stages, made.pipeline.microbatches, made.pipeline.schedule) == (2, 32, "gpipe")
    assert made.compression.forward == "delta(fixpoint:4(preset=acsgd), cache=fp16)"
    assert made.compression.backward == "fixpoint:8(preset=acsgd)"
    assert (made.compression.warmup_epochs, made.compression.evaluation) == (1, "off")
    train = made.train
    assert (train.batch_size, train.accumulate, train.epochs, train.lr) == (32, 1, 10, 5e-5)
    assert (train.warmup_steps, train.max_steps_per_epoch, train.evaluate_every) == (3, 10_000_000, 1)
    assert (train.loss_scaling, train.clip_scope, train.clip_norm) == ("sum", "stage", 1.0)
    assert (made.seed, made.model.dropout, made.measure) == (1, 0.0, "full")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "none"),
        (["--forward-compress-method", "fixpoint"], "fixpoint:4(preset=acsgd)"),
        (["--forward-compress-method", "fixpoint", "--forward-bits", "2"], "fixpoint:2(preset=acsgd)"),
        (["--forward-compress-method", "fixpoint", "--preset", "none"], "fixpoint:4"),
        (
            ["--forward-compress-method", "fixpoint", "--forward-scale-dims", "2"],
            "fixpoint:4(preset=acsgd, scale=token)",
        ),
        (
            ["--forward-compress-method", "fixpoint", "--forward-scale-dims", "0", "1", "2"],
            "fixpoint:4(preset=acsgd, scale=tensor)",
        ),
        ([*DELTA, "--preset", "none"], "delta(fixpoint:4)"),
        (
            ["--forward-compress-method", "delta-lowbits", "--forward-bits-act", "8"],
            "delta(fixpoint:4(preset=acsgd), cache=fixpoint:8(preset=acsgd))",
        ),
        (["--forward", "delta(fixpoint:2, cache=fp32)"], "delta(fixpoint:2, cache=fp32)"),
    ],
)
def test_methods_become_compressors(words, text):
    assert plain(*words).compression.forward == text


def test_random_weights_have_the_sizes_of_the_runners_or_those_given_or_a_presets():
    assert models.resolve(plain().model, plain().task).layers == 8
    made = plain("--num-layers", "2", "--embedding-dim", "32", "--num-heads", "4").model
    assert (made.checkpoint, made.layers, made.width, made.heads) == (None, 4, 32, 4)
    made = plain("--size", "micro", "--num-heads", "1").model
    assert (made.preset, made.layers, made.width, made.heads) == ("micro", None, None, 1)


def test_random_weights_beside_a_config_have_its_sizes(checkpoint):
    made = plain("--model-name", str(checkpoint)).model
    assert (made.checkpoint, made.layers, made.width, made.heads) == (None, LAYERS, WIDTH, HEADS)


def test_a_steps_samples_are_those_of_all_passes_and_groups():
    words = ("--world-size", "4", "--data-group-size", "2", "--gradient-accumulate-step", "3", "--batch-size", "8")
    made = plain(*words, "--micro-batch-size", "2", num_samples=200)
    assert (made.train.batch_size, made.train.accumulate, made.data_parallel.groups) == (48, 3, 2)
    assert (made.microbatch_size, made.pipeline.microbatches, made.world_size) == (2, 4, 4)
    assert made.train.warmup_steps == 4  # 200 // 2 samples a group, 24 of them a step


@pytest.mark.parametrize(
    ("words", "steps"),
    [([], 3), (["--num-iters", "2"], 2), (["--warmup-steps", "50"], 50), (["--warmup-steps", "0"], 0)],
)
def test_the_warm_up_is_an_epoch_of_steps_unless_it_is_given(words, steps):
    assert plain(*words, num_samples=99 + 10).train.warmup_steps == steps


def test_quantized_adam():
    words = ("--world-size", "4", "--data-group-size", "2", "--dp-mode", "sharded_ps_compressed", "--dp-bits", "4")
    made = plain(*words)
    assert (made.data_parallel.exchange, made.data_parallel.bits) == ("quantized-adam", 4)
    assert made.compression.warmup_epochs == 1, "it takes its second moment from the warm-up"
    for mode in ("allreduce", "central_ps", "sharded_ps"):
        assert plain(*words[:4], "--dp-mode", mode).data_parallel.exchange == "none"
    assert plain(*words[:4], "--exchange", "powersgd").data_parallel.exchange == "powersgd"


def test_the_first_call_needs_no_data_and_a_tokenizers_size_is_filled_in_by_the_second(checkpoint):
    words = ("--tokenizer-name", str(checkpoint))
    assert plain(*words).task.vocab_size == mapping.ANY_VOCABULARY
    assert plain(*words, vocab_size=321).task.vocab_size == 321
    assert plain(*words, "--vocab-size", "500", vocab_size=321).task.vocab_size == 500


def test_a_path_of_ones_own(tmp_path):
    text, table, other = tmp_path / "a.txt", tmp_path / "a.tsv", tmp_path / "a.dat"
    for path in (text, table, other):
        path.write_text("x")
    assert mapping.data_set(arguments.parse(["--task-name", str(text)])) == ("lm", str(text))
    assert mapping.data_set(arguments.parse(["--task-name", str(table)])) == ("classify", str(table))
    with pytest.raises(UserError, match="say --task-type"):
        mapping.data_set(arguments.parse(["--task-name", str(other)]))
    typed = arguments.parse(["--task-name", str(other), "--task-type", "classification"])
    assert mapping.data_set(typed) == ("classify", str(other))


@pytest.mark.parametrize("name", ["wikitext", "arxiv21", "cola", "qnli", "sst2"])
def test_every_published_data_set_is_known(name):
    task, corpus = mapping.data_set(arguments.parse(["--task-name", name]))
    assert (task, corpus) == ("lm" if name in ("wikitext", "arxiv21") else "classify", corpus)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--world-size", "3"], ["--world-size 3", "2 x --data-group-size 1 = 2"]),
        (["--rank", "2"], ["--rank 2", "0..1"]),
        (["--micro-batch-size", "5"], ["--batch-size 32", "--micro-batch-size 5"]),
        (["--use-cuda", "true"], ["--use-cuda true", "CPU"]),
        (["--dist-backend", "cupy_nccl"], ["--dist-backend cupy_nccl", "gloo"]),
        (["--fp16"], ["--fp16", "--autocast bf16"]),
        (["--backward-compress-method", "delta"], ["--backward-compress-method delta", "fixpoint"]),
        (["--backward-compress-method", "delta-lowbits"], ["--backward-compress-method delta-lowbits"]),
        (["--forward-compress-method", "fixpoint", "--forward-scale-method", "l2"], ["l2", "max"]),
        (["--forward-compress-method", "fixpoint", "--forward-scale-dims", "1"], ["--forward-scale-dims 1", "0 1; 2"]),
        ([*DELTA, "--forward", "fixpoint:2"], ["--forward and --forward-compress-method"]),
        (["--forward", "fixpiont:2"], ["fixpiont"]),
        ([*DELTA, "--n-epochs", "1"], ["--warmup-epochs 1 of --n-epochs 1"]),
        (["--exchange", "none", "--dp-mode", "allreduce"], ["--exchange and --dp-mode"]),
        (["--task-name", "wikitexd"], ["wikitexd", "Did you mean 'wikitext'?"]),
        (["--task-type", "classification"], ["--task-type classification does not fit --task-name pydoc"]),
        (["--family", "gtp2"], ["--family 'gtp2'", "gpt2"]),
        (["--model-name", "llama-7b"], ["llama-7b", "--family"]),
        (["--size", "huge"], ["--size 'huge'"]),
        (["--cuts", "0"], ["pipeline.cuts"]),
    ],
)
def test_what_cannot_be_run_is_refused_by_its_arguments_name(words, parts):
    message = refused(*words)
    assert [part for part in parts if part not in message] == []


def test_too_few_samples_for_one_step_are_refused():
    assert "31 training samples do not fill one step of --batch-size 32" in refused(num_samples=31)


def test_a_cache_that_is_too_small_names_the_rows_it_needs():
    args = arguments.parse([*DELTA, "--max-activation-cache-size", "99"])
    mapping.refuse_small_cache(args, 99)
    with pytest.raises(UserError, match="Say --max-activation-cache-size 100"):
        mapping.refuse_small_cache(args, 100)
    apart = arguments.parse([*DELTA, "--max-activation-cache-size", "99", "--data-group-size", "2"])
    mapping.refuse_small_cache(apart, 199)  # each group has a half
    mapping.refuse_small_cache(arguments.parse(["--max-activation-cache-size", "1"]), 10**6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-layers", "3"], None),
        (["--num-layers", "4"], "x --pipeline-group-size 2 = 8 blocks, but .* has 6; say --num-layers 3"),
        (["--embedding-dim", "48"], None),
        (["--embedding-dim", "768"], "say --embedding-dim 48"),
        (["--num-heads", "12"], "say --num-heads 4"),
        (["--world-size", "4", "--pipeline-group-size", "4", "--num-layers", "1"], "has 6; leave it out"),
    ],
)
def test_sizes_are_held_against_the_checkpoint(checkpoint, words, message):
    args = arguments.parse(
        [*TWO, "--model-name", str(checkpoint), "--task-name", "pydoc", "--seq-length", "64", *words]
    )
    made = mapping.run_spec(args)
    shape = models.resolve(made.model, made.task)
    if message is None:
        mapping.refuse_other_sizes(args, shape)
        return
    with pytest.raises(UserError, match=message):
        mapping.refuse_other_sizes(args, shape)


def test_the_family_follows_from_the_checkpoint_or_the_name(checkpoint):
    assert mapping.family(arguments.parse(["--model-name", str(checkpoint)])) == "gpt2"
    assert mapping.family(arguments.parse(["--model-name", "microsoft/deberta-v3-base"])) == "deberta"
    assert mapping.family(arguments.parse(["--model-name", "gpt2-xl"])) == "gpt2"
    assert mapping.family(arguments.parse(["--model-name", "mine", "--family", "deberta"])) == "deberta"


def test_every_setting_in_the_table_is_one_and_an_error_names_the_argument():
    assert set(SETTINGS.values()) <= {*setting_keys(), "seed"}
    assert set(SETTINGS) <= {row.name for row in arguments.rows()}
    assert mapping.explain("no setting here") == "no setting here"
    assert mapping.explain("lower task.num_sequences (9)").endswith("Here task.num_sequences is --num-sequences.")
    assert "task.corpus" not in mapping.explain("task.corpus_sha256 differs").partition("Here")[2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], []),
        (["--cuda-id", "1"], ["--cuda-id has no effect"]),
        (["--train-data", "a.tsv"], ["--train-data has no effect: in AC-SGD neither; --task-name"]),
        (["--loss-scale", "8"], ["--loss-scale has no effect"]),
        (["--forward-bits", "3"], ["--forward-bits has no effect: --forward-compress-method is none"]),
        ([*DELTA, "--forward-bits", "3", "--max-activation-cache-size", "9"], []),
        ([*DELTA, "--forward-bits-act", "3"], ["--forward-bits-act has no effect"]),
        (["--forward-compress-method", "delta-lowbits", "--forward-bits-act", "3"], []),
        (["--max-activation-cache-size", "9"], ["--max-activation-cache-size has no effect"]),
        (["--dp-mode", "central_ps", "--dp-bits", "4"], ["--dp-mode has no effect", "--dp-bits has no effect"]),
        (["--data-group-size", "2", "--dp-mode", "central_ps"], ["--dp-mode central_ps: gradients are averaged"]),
        (["--data-group-size", "2", "--dp-bits", "4"], ["--dp-bits has no effect"]),
        (["--data-group-size", "2", "--dp-mode", "sharded_ps_compressed", "--dp-bits", "4"], []),
        (["--warmup-epochs", "2"], ["--warmup-epochs has no effect: nothing is compressed"]),
        (["--profiling", "no-profiling", "--trace-postfix", "a"], ["--trace-postfix has no effect"]),
        (["--lr", "1", "--lr", "2"], ["--lr was given more than once"]),
        (["--dropout-masks", "step"], ["--dropout-masks has no effect"]),
    ],
)
def test_what_has_no_effect_is_said(words, said):
    found = notes(arguments.parse(words))
    assert len(found) == len(said), found
    assert [line for line, start in zip(sorted(found), sorted(said), strict=True) if not line.startswith(start)] == []


def test_a_traces_name_is_theirs():
    words = ["--rank", "3", "--profiling", "tidy_profiling", "--gradient-accumulate-step", "2", "--trace-postfix", "x"]
    assert mapping.trace_name(arguments.parse(words), 64) == (
        "gpt3_gpipe_b32_8_l1024_m64_w4_p4_2_d1_3_tidy_profiling_x.json"
    )
    groups = ["--data-group-size", "2", "--dp-mode", "sharded_ps", "--profiling", "pytorch_profiling"]
    assert mapping.trace_name(arguments.parse(groups), 64) == (
        "gpt3_gpipe_sharded_ps_b32_8_l1024_m64_w4_p4_1_d2_0_pytorch_profiling_default.json"
    )


LOCAL = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.5"]}


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({}, "lo"),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, "eth0"),
        ({"NCCL_SOCKET_IFNAME": "eth0"}, "eth0"),
        ({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "eth0"}, "lo"),
        ({"GLOO_SOCKET_IFNAME": ""}, "lo"),
    ],
)
def test_the_interface_is_the_environments_or_the_one_that_leads_to_the_host(environment, name):
    assert interface.choose("tcp://127.0.0.1:9000", environment, LOCAL) == name


def test_an_interface_that_is_not_there_is_refused():
    with pytest.raises(UserError, match=r"GLOO_SOCKET_IFNAME is 'eth1'.*Did you mean 'eth0'"):
        interface.choose("tcp://127.0.0.1:9000", {"GLOO_SOCKET_IFNAME": "eth1"}, LOCAL)
    with pytest.raises(UserError, match=r"no interface has the address 127\.0\.0\.1"):
        interface.choose("tcp://127.0.0.1:9000", {}, {"eth0": ["10.0.0.5"]})


@pytest.mark.parametrize("url", ["127.0.0.1:9000", "tcp://127.0.0.1", "tcp://:9000", "tcp://h:port", "tcp://h:1/x", ""])
def test_a_dist_url_is_tcp_host_and_port(url):
    with pytest.raises(UserError, match="must be tcp://HOST:PORT"):
        interface.endpoint(url)


def test_a_machine_too_small_for_its_own_rank_is_refused():
    launch.refuse_large(0, 1)
    with pytest.raises(UserError, match=r"rank 3 needs 1048576\.00 GiB"):
        launch.refuse_large(3, 2**50)


def test_ranks_make_the_runs_folder_in_any_order_and_remove_only_their_own(tmp_path):
    made, store = plain(), Store(tmp_path)
    folder = launch.begin(store, made, 1)
    for name in ("rank0.jsonl", "rank1.jsonl", "steps.rank0.parquet", "steps.rank1.parquet", "status.json"):
        (folder / name).write_text("{}")
    launch.begin(store, made, 1)
    assert {path.name for path in folder.iterdir()} == {"run.json", "rank0.jsonl", "steps.rank0.parquet", "status.json"}
    (folder / "checkpoints" / "step-00000004").mkdir(parents=True)
    (folder / "checkpoints" / "step-00000004" / "complete.json").write_text("{}")
    launch.begin(store, made, 0)
    assert {path.name for path in folder.iterdir()} == {"run.json", "rank0.jsonl", "checkpoints"}
    assert store.spec(made.run_id) == made

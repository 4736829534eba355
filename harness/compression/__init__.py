"""Compressors: what crosses a boundary instead of the tensor.

    grammar.py   text -> compressor; checks, canonical form and plug-in names without importing torch
    base.py      the contracts
    codecs/      one file each                    memories/  one file each, wrap a codec
    row_memory.py with rows.py, keys.py, disk.py   what memories keep, whose it is, and where
    tensors.py, halves.py, blocked.py, hosted.py, masked.py, indices.py   what codecs share
    budget.py    a step's bytes shared out        warm_up.py   compiles what a run needs, before it forks
    formula.py   arithmetic in plug-ins' literals
    kernels/     reference.py is the definition in plain torch; cpu.py gives the same bytes, fused; cuda.py on a GPU

A plug-in is one file. Its class is the one subclass of `Codec` (or `Memory`) that the module defines, and its
literals say everything the grammar needs, so nothing is registered and nothing imported to check a text:

    VERSION = 1                       raise it whenever the bytes or the numbers change
    SUMMARY = "..."  SOURCE = "..."   one line each, shown in listings
    PARAMETERS = {name: entry, ...}   in the order shown; the constructor takes each as a keyword argument
    CONTRACT = {text: {...}, ...}     texts the contract suite runs its battery on, and what it may expect

Three more are optional, expressions being those of formula.py over the parameters' names (a nested codec counts as
its own bits an element, and NAME_unbiased is whether it is):

    FORMULA = "bits + 16 / block"     bits an element of a large message of 512 columns, side information that counts
                                      included, where that is not simply `bits` or the nested codec's: one of them must
                                      be there. An estimate where the length depends on the data
    UNBIASED = "rounding == 'stochastic'"   whether the mean of its draws is the input; not given: it is not
    STATE = "shared"                  what it keeps between messages (base.Compressor.state); not given: nothing

A file whose name has an underscore is a compressor with a hyphen (ef_mixed.py is `ef-mixed`).

An entry of PARAMETERS is a dict:

    place    "option" (key=value, the default), "argument" (after the colon), "item" (a nested compressor),
             "fixed" (not written and not given to the constructor; `value` says what it is)
    type     "int", "float", "word" or "codec" (nested text; the constructor gets the built codec)
    default  what an option is when not written; without it the parameter is required
    min, max inclusive range of a number                  above    exclusive lower end of a number
    choices  the words allowed; with type "codec", words allowed besides a codec (given as they are)
    aliases  {word: word}, other spellings of a choice, never in a canonical text
    pins     {word: [option, ...]}: that choice settles those options, so they cannot be written beside it
    needs    {word: {parameter: least}}: that choice asks at least this much of another parameter
    plain    True: a nested codec here keeps nothing between messages and reads no forward tensor
    uses     {word: [what, ...]}: that choice asks something of where the compressor stands: "peer": it reads the
             forward tensor, so it is for gradients only; "relu": the boundary must carry a ReLU's output. "steering"
             asks nothing: its class is `Steered` too (base.py, harness/rate_control.py)

The parameter called `bits` (argument or fixed; None: there is no such number) is what `grammar.bits` reports as
configured; a memory and a codec that wraps a codec report that of their item, a memory times its fixed parameter
`messages`, if it has one. A memory that sends samples it has not met by another codec has that as its parameter `first`
(`grammar.first_visit_bits`: predictions). A default is part of the meaning its plug-in's VERSION stands for.

An entry of CONTRACT bounds the error of one message. What is not given is 0:

    relative, absolute, floor   each element: |decoded - x| <= relative |x| + absolute max|x| + floor
    norm                        instead of these: ||decoded - x|| <= norm ||x|| + floor in the 2-norm, for codecs that
                                are projections (topk, lowrank): norm <= 1
    largest                     a finite value above it is a CodecError
    unbiased                    the mean over keys is x wherever nothing clips; the text's bytes depend on the message
    keyed                       bytes depend on the message (Context.key) though nothing says "stochastic"
    entropy                     coded: the length is within 3 % of the entropy of what is coded and side information
                                (the class has `ideal_bytes(x, ctx)`, that sum for a tensor)
    change                      a memory's: its bounds above hold for a first visit, on later ones of a sample
                                |decoded - x| <= change x max|x - m|

A text whose `uses` has "peer" is given, as Context.peer, a tensor with about half of its elements zero; bounds then
hold where the peer is not zero, and what is decoded is zero elsewhere.

What tests/contract/test_codecs.py asks of a codec, besides those bounds (codecs/none.py keeps all of it in 50 lines;
tensors.py has the helpers named here):

    input       any strides, float32 or narrower, with or without a graph (`dense`); empty tensors and any number of
                axes from one on; zero comes back as zero; tiny, subnormal and huge values
    output      encode writes its payload and not a byte beside it, no more than `max_bytes`, exactly `num_bytes` where
                that is not None; decode returns the very `out` it was given
    repeatable  the same message (Context) gives the same bytes from any instance, with diagnose or without; only a text
                with "stochastic" in it, or `keyed`, may, and then must, give other bytes for another message. (A
                stateful codec: from any instance that has met the same messages.)
    bits        where `grammar.bits` is not None, a large message takes what FORMULA says (without one: that many bits
                an element), within 0.04
    diverged    NaN or infinity in the input: DivergedError, "non-finite" in its text (`raise_if_diverged`)
    overflow    a finite value above `largest`: OverflowedError in encode, "made a non-finite value from a finite one"
                in its text, and the codec to use instead (halves.py); the run is then one that diverged
    malformed   a payload longer or shorter than it can be: CodecError with "malformed" (`require_length`); random bytes
                of the right length: something finite, or CodecError, and of 100 tries at least one is refused, so
                scales or values must be checked (finite, not negative)
    diagnose    encode then fills `diagnostics`: "rel_error" always (`own_decoding`, `relative_error`), "clip_fraction"
                where codes can clip

A codec may offer `encode_change` and `decode_change` (see codecs/fixpoint.py), by which delta forms, codes and
adds a change in one pass; the bytes and the state are those of the plain way, which the suite checks.

What tests/contract/test_memories.py asks of a memory (memories/ef.py is the shortest). Its constructor is given by
name, besides its parameters, `capacity` (samples it will meet, None: not known) and `folder` (for rows on disk):

    both ends   `state` shared: digests equal after any sequence of messages, also with repeats and missing samples;
                sender: the receiver decodes without a state. `encode_decoded` gives what the other end decodes, and the
                bytes and state of `encode`
    shared      CONTRACT's `change` bounds later visits; a sample that stays the same comes closer with each visit
    sender      what a message loses is sent later: the sum of what was decoded stays near to that of the inputs
    untouched   evaluation is refused; a non-finite input, a malformed payload or a missing id leaves all as it was
    saved       state_dict and load_state_dict: goes on as if nothing had happened
    told        `state_bytes` is what it holds, and a run is refused by the forecast in harness/memory.py, which knows
                the options `cache`, `key` and `store` by these names
"""

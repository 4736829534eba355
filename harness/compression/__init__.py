"""Compressors: what crosses a boundary instead of the tensor.

    grammar.py   text -> compressor; checks, canonical form and plug-in names without importing torch
    base.py      the contracts
    codecs/      one file each, no state          memories/  one file each, wrap a codec
    rows.py      per-sample storage that memories share; halves.py, tensors.py: what codecs share
    kernels/     reference.py is the definition in plain torch; cpu.py gives the same bytes, fused

A plug-in is one file. Its class is the one subclass of `Codec` (or `Memory`) that the module defines, and its
literals say everything the grammar needs, so nothing is registered and nothing imported to check a text:

    VERSION = 1                       raise it whenever the bytes or the numbers change
    SUMMARY = "..."  SOURCE = "..."   one line each, shown in listings
    PARAMETERS = {name: entry, ...}   in the order shown; the constructor takes each as a keyword argument
    CONTRACT = {text: {...}, ...}     texts the contract suite runs its battery on, and what it may expect

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

The parameter called `bits` (argument or fixed) is what `grammar.bits` reports as configured; a memory reports
that of its item. A memory that sends samples it has not met by another codec has that as its parameter `first`
(`grammar.first_visit_bits`: predictions). A default is part of the meaning its plug-in's VERSION stands for.

An entry of CONTRACT bounds the error of one message: |decoded - x| <= relative |x| + absolute max|x| + floor.
`largest` says that a value above it is a CodecError, `unbiased` that the mean over keys is x wherever nothing
clips. A memory's bounds hold for a first visit; on later ones |decoded - x| <= change x max|x - m|.

What tests/contract/test_codecs.py asks of a codec, besides those bounds (codecs/none.py keeps all of it in 50 lines;
tensors.py has the helpers named here):

    input       any strides, float32 or narrower, with or without a graph (`dense`); empty tensors and any number of
                axes from one on; zero comes back as zero; tiny, subnormal and huge values
    output      encode writes its payload and not a byte beside it, no more than `max_bytes`, exactly `num_bytes` where
                that is not None; decode returns the very `out` it was given
    repeatable  the same message (Context) gives the same bytes from any instance, with diagnose or without; only a text
                with "stochastic" in it may, and then must, give other bytes for another message
    bits        where `grammar.bits` is not None, a large message takes that many bits an element, within 0.04
    diverged    NaN or infinity in the input: DivergedError, "non-finite" in its text (`raise_if_diverged`)
    overflow    a finite value above `largest`: CodecError in encode, "made a non-finite value from a finite one" in its
                text, and the codec to use instead (halves.py)
    malformed   a payload longer or shorter than it can be: CodecError with "malformed" (`require_length`); random bytes
                of the right length: something finite, or CodecError, and of 100 tries at least one is refused, so
                scales or values must be checked (finite, not negative)
    diagnose    encode then fills `diagnostics`: "rel_error" always (`own_decoding`, `relative_error`), "clip_fraction"
                where codes can clip

A codec may offer `encode_change` and `decode_change` (see codecs/fixpoint.py), by which delta forms, codes and
adds a change in one pass; the bytes and the state are those of the plain way.
"""

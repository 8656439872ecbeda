// nextflow run examples/cluster/embed.nf -with-docker --features features_gigapath --checkpoint slide_encoder.pth
//
// Each of `parts` tasks embeds its part of the slides in a folder of its own, and the files are gathered in `output`. A
// task that was killed is tried again. Slides that cannot be embedded are named in skipped.N.txt and fail no task.
params.parts = 16
params.output = 'embeddings'

process EMBED {
    container 'registry.example.com/dilated-attention-pytorch:0.1.0' // examples/cluster/Dockerfile, EXTRAS=slides
    cpus 8
    memory 64.GB
    accelerator 1
    time 4.h
    errorStrategy 'retry'
    maxRetries 2
    publishDir params.output, mode: 'copy', saveAs: { it.tokenize('/').last() }

    input:
    path features
    path checkpoint
    val part

    output:
    path 'embeddings/*', optional: true
    path 'skipped.*.txt'

    script:
    """
    dilated-attention embed ${features} --checkpoint ${checkpoint} --output embeddings --part ${part}/${params.parts} \\
        --threads ${task.cpus} 2> skipped.${part}.txt || test \$? -eq 1
    """
}

workflow {
    EMBED(file(params.features), file(params.checkpoint), channel.of(1..params.parts))
}

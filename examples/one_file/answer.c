/* Classify an image with a model of 'edge-agent export', by the C interface of ONNX Runtime.
 *
 *   cc answer.c -I/usr/include/onnxruntime/core/session -lonnxruntime -o answer
 *   ./answer cat.onnx HEIGHT WIDTH CHANNELS < pixels.raw
 *
 * Standard input: one image of the model's size, one byte a value, in the order height, width, channels.
 * Standard output: the probabilities of the labels, in their order. The labels are in the file's metadata.
 */
#include <onnxruntime_c_api.h>
#include <stdio.h>
#include <stdlib.h>

static const OrtApi *ort;

/* End the program if a call has failed. */
static void check(OrtStatus *status) {
    if (status == NULL) return;
    fprintf(stderr, "%s\n", ort->GetErrorMessage(status));
    exit(1);
}

int main(int count, char **arguments) {
    if (count != 5) {
        fprintf(stderr, "expected MODEL HEIGHT WIDTH CHANNELS\n");
        return 2;
    }
    ort = OrtGetApiBase()->GetApi(ORT_API_VERSION);
    if (ort == NULL) {
        fprintf(stderr, "the library is older than the header\n");
        return 1;
    }

    /* 1. Load the model. */
    OrtEnv *environment;
    OrtSessionOptions *options;
    OrtSession *session;
    check(ort->CreateEnv(ORT_LOGGING_LEVEL_WARNING, "answer", &environment));
    check(ort->CreateSessionOptions(&options));
    check(ort->CreateSession(environment, arguments[1], options, &session));

    /* 2. Read the pixels as they are; the model normalises them. */
    int64_t shape[4] = {1, atoll(arguments[2]), atoll(arguments[3]), atoll(arguments[4])};
    size_t size = (size_t)(shape[1] * shape[2] * shape[3]);
    unsigned char *pixels = malloc(size);
    if (pixels == NULL || fread(pixels, 1, size, stdin) != size) {
        fprintf(stderr, "expected %zu bytes of pixels\n", size);
        return 1;
    }
    OrtMemoryInfo *memory;
    OrtValue *input, *output = NULL;
    check(ort->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory));
    check(ort->CreateTensorWithDataAsOrtValue(memory, pixels, size, shape, 4, ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8,
                                              &input));

    /* 3. Run the model, and print the probability of each label. */
    const char *input_names[] = {"image"}, *output_names[] = {"probabilities"};
    check(ort->Run(session, NULL, input_names, (const OrtValue *const *)&input, 1, output_names, 1, &output));
    OrtTensorTypeAndShapeInfo *info;
    size_t labels;
    float *probabilities;
    check(ort->GetTensorTypeAndShape(output, &info));
    check(ort->GetTensorShapeElementCount(info, &labels));
    check(ort->GetTensorMutableData(output, (void **)&probabilities));
    for (size_t label = 0; label < labels; label++) printf("%.6f\n", probabilities[label]);
    return 0;
}

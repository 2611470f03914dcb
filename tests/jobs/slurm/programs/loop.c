/* A program that is not Python: prints its progress, writes its state every 20 steps (then renames), resumes, and
   handles no signal. usage: loop STEPS */
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

int main(int argc, char **argv) {
    const char *rank = getenv("RANK") ? getenv("RANK") : "0";
    long step = 0, steps = argc > 1 ? atol(argv[1]) : 100;
    char path[100], fresh[110];
    mkdir("out", 0755);
    snprintf(path, sizeof path, "out/state-%s.txt", rank);
    snprintf(fresh, sizeof fresh, "%s.tmp", path);
    setvbuf(stdout, NULL, _IOLBF, 0);
    FILE *file = fopen(path, "r");
    if (file && fscanf(file, "%ld", &step) == 1) printf("resumed at %ld\n", step);
    if (file) fclose(file);
    while (step < steps) {
        usleep(100000);
        step++;
        if (step % 5 == 0) printf("step %ld\n", step);
        if (step % 20 == 0 && (file = fopen(fresh, "w"))) {
            fprintf(file, "%ld\n", step);
            fclose(file);
            rename(fresh, path);
        }
    }
    return 0;
}
